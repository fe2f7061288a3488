"""The forms of the OpenAI API: requests read, responses and errors written.

A body becomes a `CompletionRequest` (`request`, `parameters`), an engine's output the object that answers it
(`response`, `logprobs`), and an exception an `ApiError` with OpenAI's code, type and status (`errors`). `batch` reads
and writes the lines of a batch file around them. Nothing here knows where a body came from or where a response goes.
"""
