"""`winnow cache`: the folder of models as this processor reads them."""

import argparse
import time

from winnow.values.units import format_bytes

DESCRIPTION = """\
List or clear the models that were kept, packed, for their next start.

The folder is ~/.cache/winnow/models, or below XDG_CACHE_HOME. Beyond its limit, 8 GiB or what the environment's
WINNOW_MODEL_CACHE says (such as 2GiB; 0 keeps none), what was used longest ago goes. Clearing it costs nothing but
the next start's time.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "winnow cache list|clear"
    parser.description = DESCRIPTION
    parser.add_argument("action", choices=("list", "clear"), help="what to do with it")


def execute(namespace: argparse.Namespace) -> int:
    from winnow.models.load.packed.cache import cache_directory, cache_limit, clear_cache, list_cache

    entries = list_cache()
    for entry in entries:
        days = (time.time() - entry.used_at) / 86400
        print(
            f"{format_bytes(entry.nbytes):>10}  used {days:.1f} days ago  {entry.packed_from} ({entry.form})"
        )
    total = format_bytes(sum(entry.nbytes for entry in entries))
    if namespace.action == "clear":
        clear_cache()
        print(f"{cache_directory()}: {total} removed")
    else:
        print(f"{cache_directory()}: {total} of {format_bytes(cache_limit())}")
    return 0
