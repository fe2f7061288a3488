"""Deferring Ctrl-C to the end of a step."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Self


class DeferredInterrupt:
    """Context manager that handles the first SIGINT at its end, so that work of milliseconds is not interrupted.

    Handles a second SIGINT at once, in case the work takes longer than expected. Python handles signals in the main
    thread, between any two instructions; in other threads this has no effect.
    """

    def __init__(self) -> None:
        self._handler: signal._HANDLER = None
        self._received: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):  # else it is ignored, ends the process, or was not installed by Python
                self._handler = handler
                signal.signal(signal.SIGINT, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        handler = self._handler
        if callable(handler):
            signal.signal(signal.SIGINT, handler)
            self.handle()

    def handle(self) -> None:
        """Handle a SIGINT received so far; usually raises KeyboardInterrupt."""
        received, self._received = self._received, None
        if received is not None and callable(self._handler):
            self._handler(*received)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._received is None:
            self._received = number, frame
        elif callable(self._handler):
            self._received = None
            self._handler(number, frame)
