"""What the five texts print, computed: corrected, or by a planner that is fitted to some rows of the papers."""

import argparse
import sys
from pathlib import Path

from winnow.cli.flags.paths import check_json_path, write_json
from winnow.report.provenance import typed_command
from winnow_lab.papers.plan.batch_max import batch_max
from winnow_lab.papers.plan.baton import baton
from winnow_lab.papers.plan.kcache import kcache, kcache_attention
from winnow_lab.papers.plan.kv_compress import kv_compress
from winnow_lab.papers.plan.memory_text import TABLES
from winnow_lab.report.tables import console, print_tables

DESCRIPTION = """\
Print tables of the text on KV cache memory, corrected, and what KV-Compress, Batch-Max, BATON and KCache
print for their machines beside a planner that is fitted to some of those rows. Nothing is run.
"""
EPILOG = """\
examples:
  python -m winnow_lab.papers plan memory
  python -m winnow_lab.papers plan kcache --json kcache.json
"""
ALL = "all"
PAPERS = {
    "kv-compress": kv_compress,
    "batch-max": batch_max,
    "baton": baton,
    "kcache": kcache,
    "kcache-attention": kcache_attention,
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = f"{parser.prog} [options] [TABLE]"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    known = (*TABLES, *PAPERS, ALL)
    parser.add_argument("table", nargs="?", choices=known, default=ALL, help="(default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the tables as JSON too")
    parser.add_argument("--markdown", action="store_true", help="print tables as Markdown")


def execute(namespace: argparse.Namespace) -> int:
    check_json_path(namespace.json)
    known = {**TABLES, **PAPERS}
    names = known if namespace.table == ALL else [namespace.table]
    tables = [known[name]() for name in names]
    if namespace.markdown:
        sys.stdout.writelines(f"{line}\n" for table in tables for line in table.markdown())
    else:
        print_tables(console(), tables, dense=True)
    values = [{"title": t.title, "columns": [t.corner, *t.columns], "rows": t.rows} for t in tables]
    write_json(namespace.json, {"command": typed_command(), "tables": values})
    return 0
