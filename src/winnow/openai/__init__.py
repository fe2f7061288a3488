"""The forms of the OpenAI API: requests read, responses and errors written.

A body becomes a `CompletionRequest` (`request`, `parameters`), an engine's output the object that answers it
(`response`, `logprobs`), and an exception an `ApiError` with OpenAI's code, type and status (`errors`). Nothing
here knows where a body came from or where a response goes.
"""
