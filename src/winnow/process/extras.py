"""What other distributions bring: commands that install them without an index that knows Winnow, and their plug-ins."""

from importlib.metadata import entry_points
from typing import Any

from winnow.errors import ConfigError

GET_THE_LAB = "in a checkout of Winnow, pip install ./lab"


def install_hint(extra: str, distribution: str = ".") -> str:
    """Return the command that installs an extra of the distribution in that folder of a checkout."""
    return f"in a checkout of Winnow, pip install '{distribution}[{extra}]'"


def install_plugin(folder: str) -> str:
    return f"in a checkout of Winnow, pip install ./plugins/{folder}"


def find_plugin(group: str) -> Any:
    """Return what an installed distribution offers under the entry points `winnow.GROUP`; None: there is none."""
    found = next(iter(entry_points(group=f"winnow.{group}")), None)
    return None if found is None else found.load()


def require_plugin(group: str, what: str, folder: str = "") -> Any:
    """Return the plug-in of a group, which lies in plugins/`folder` of a checkout ("": of the group's name). Raises
    ConfigError: `what` needs it, and it is not installed."""
    found, name = find_plugin(group), folder or group
    if found is None:
        raise ConfigError(f"{what} needs winnow-{name}: {install_plugin(name)}")
    return found
