"""What one line can do wrong, with the codes that its error record names."""

from winnow.errors import CapacityError, ContextLengthError, WinnowError


class LineError(WinnowError):
    """One line of the input cannot be run; the others are not affected.

    `code` is for programs, the message for people.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code

    @classmethod
    def wrap(cls, error: WinnowError) -> "LineError":
        """What the engine says about a request, with the code that fits."""
        if isinstance(error, ContextLengthError):
            return cls("context_length_exceeded", str(error))
        if isinstance(error, CapacityError):
            return cls("kv_memory_exceeded", str(error))
        return cls("invalid_request", str(error))
