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


def origin_of_run(head: Mapping[str, Any]) -> list[str]:
    """The same as code with a line below, for pages that several commands wrote; ends with an empty line."""
    machine = head["machine"]
    where = f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch_version']}"
    return [
        f"    {shlex.join(head['command'])}",
        "",
        f"(commit {head['commit']}; {where}; {head['date'][:10]})",
        "",
    ]
