"""Nested values between ranks, without pickle: one encoder, and three verbs (gather, broadcast, stream)."""
