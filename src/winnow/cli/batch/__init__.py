"""Offline batch inference: a file of prompts in, a file of answers out, resumable at any moment.

The way of one line: `reader` finds it, `lines` understands it, `driver` hands it to the engine, `records` writes the
answer in the form of the question, `writer` puts it into the output in input order and keeps what is early in the
`journal`. `fingerprint` tells whether an unfinished output belongs to the run that wants to continue it.
"""
