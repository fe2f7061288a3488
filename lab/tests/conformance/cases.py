"""Cases of a client: one method each, which raises where an answer is wrong."""

import traceback
from collections.abc import Callable


def run_cases(cases: object) -> int:
    """Run every case, say how it went, and return 1 if one failed."""
    failed = 0
    for name in (name for name in vars(type(cases)) if not name.startswith("_")):
        case: Callable[[], None] = getattr(cases, name)
        try:
            case()
            print(f"ok      {name}")
        except Exception:
            failed += 1
            print(f"FAILED  {name}")
            traceback.print_exc()
    return 1 if failed else 0
