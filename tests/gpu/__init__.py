"""Tests that need a GPU: pytest -m gpu tests/gpu."""
