"""Build script. Metadata lives in pyproject.toml; extensions that setuptools cannot declare there are added here."""

from setuptools import setup

setup()
