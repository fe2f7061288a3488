"""What a command can raise beside the engine's own errors."""

from winnow.errors import WinnowError


class UsageError(WinnowError):
    """The command line, or a file that it names, is unusable."""
