"""Choices and predictions from costs alone: pure functions on plain data, without torch or Lightning."""
