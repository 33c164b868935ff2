"""Fixtures of the integration tests."""

from tests.support.s3 import s3_credentials, s3_server

__all__ = ["s3_credentials", "s3_server"]
