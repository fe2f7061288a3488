"""What one line can do wrong, with the codes that its error record names."""

from winnow.errors import CapacityError, ContextLengthError, WinnowError, describe_error

INTERNAL = "internal_error"
"""The code of what is nobody's mistake but Winnow's."""
FAILED = "request_failed"
"""The code of a request that was sound and began, and could not be brought to an end."""


class LineError(WinnowError):
    """One line of the input cannot be run; the others are not affected.

    `code` is for programs, the message for people.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code

    @classmethod
    def wrap(cls, error: Exception) -> "LineError":
        """What went wrong with a request, with the code that fits.

        What is no `WinnowError` is a fault of Winnow's own that this line brought out.
        """
        if isinstance(error, ContextLengthError):
            return cls("context_length_exceeded", str(error))
        if isinstance(error, CapacityError):
            return cls("kv_memory_exceeded", str(error))
        if isinstance(error, WinnowError):
            return cls("invalid_request", str(error))
        return cls(INTERNAL, describe_error(error))
