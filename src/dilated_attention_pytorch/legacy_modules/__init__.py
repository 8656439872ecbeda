"""Modules of earlier packages whose calls differ from today's, so that old calls run or say what to write."""
