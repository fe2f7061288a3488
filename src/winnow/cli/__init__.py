"""The command line: thin commands around `winnow.LLM`."""
