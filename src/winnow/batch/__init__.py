"""Offline batch inference: a file of prompts in, a file of answers out, resumable at any moment.

A line passes through `reader` (raw lines), `lines` (requests), `driver` (the engine), `records` (the answer in the form
of the request) and `writer` (the output in input order; early results in the `journal`). `winnow.openai` has the forms
of the OpenAI API; `winnow.report.fingerprint` decides whether an unfinished output may be resumed.
"""
