"""The program `twinkle`: what is installed, and whether it works."""

from twinkle.cli.main import main

__all__ = ['main']
