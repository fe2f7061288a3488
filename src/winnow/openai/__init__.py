"""The forms of the OpenAI API: a body becomes a `CompletionRequest`, an engine's output the object that answers it, an
exception an `ApiError`. Nothing here knows where a body came from or where a response goes.
"""
