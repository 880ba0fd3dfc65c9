"""What pyproject.toml has no key for: the cffi module, and the wheel's stable-ABI tag."""

from setuptools import setup

setup(
    cffi_modules=["tiering/aio/_build.py:ffibuilder"],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
