"""Conversation of `winnow chat --session NAME`, in a file."""

import json
import os
import re
from pathlib import Path
from typing import Any

from winnow.errors import UsageError

_NAME = re.compile(r"[\w.-]{1,64}")


class ConversationLog:
    """File of a conversation's messages, in XDG_STATE_HOME/winnow/chats. Raises UsageError: a wrong name."""

    def __init__(self, name: str) -> None:
        if not _NAME.fullmatch(name) or name.startswith("."):
            raise UsageError(
                f"--session must be 1 to 64 letters, digits, dots, dashes or underscores, got {name!r:.80}"
            )
        state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
        self.path = state / "winnow" / "chats" / f"{name}.json"

    def load(self) -> list[dict[str, Any]]:
        """Return its messages; none where there is no file. Raises UsageError: the file is none of a conversation, or
        cannot be read."""
        try:
            messages = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            raise UsageError(f"--session: {self.path} cannot be read: {error}") from None
        if not isinstance(messages, list) or not all(
            isinstance(each, dict)
            and each.keys() == {"role", "content"}
            and isinstance(each["role"], str)
            and isinstance(each["content"], str | list)
            for each in messages
        ):
            raise UsageError(f"--session: {self.path} holds no conversation")
        return messages

    def save(self, messages: list[dict[str, Any]]) -> None:
        """Write messages in place of those before, whole or not at all; the owner alone can read them. Raises
        UsageError: the disk refuses."""
        part = self.path.with_suffix(f".{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(
                os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8"
            ) as file:
                json.dump(messages, file, ensure_ascii=False, indent=1)
            part.replace(self.path)
        except OSError as error:
            raise UsageError(f"--session: {self.path} cannot be written: {error}") from None
