"""Where a report's numbers come from, as its pages say it."""

import shlex
from collections.abc import Mapping
from typing import Any


def device_name(machine: Mapping[str, Any]) -> str:
    """What did the work: the accelerator, or the processor with the cores it could use."""
    return machine["accelerator"] or f"{machine['cpu']}, {machine['cores']} cores"


def origin(head: Mapping[str, Any]) -> list[str]:
    """Command, commit, date and machine of a report's head, as two entries of a Markdown list."""
    machine = head["machine"]
    return [
        f"- command: `{shlex.join(head['command'])}`",
        f"- commit {head['commit'] or 'unknown'}, {head['date']}, {device_name(machine)}, "
        f"torch {machine['torch_version']}",
    ]
