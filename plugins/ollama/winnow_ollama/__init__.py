"""Ollama's API: bodies read as chats and completions, and answers as lines of JSON."""
