"""Anthropic's Messages API: a body read as a chat of OpenAI's form, and a message written from a chat's chunks."""
