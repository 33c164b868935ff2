"""What can go wrong with files and objects, in words: the object, what happened, the remedy; never a credential."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

from boto3.exceptions import Boto3Error
from botocore import exceptions as botocore
from s3transfer.exceptions import RetriesExceededError, S3DownloadFailedError

from engine.errors import InputError


class StorageError(InputError):
    """A file or object that can't be read or written.

    Attributes:
        worth_retrying: another run may succeed with the same input.
    """

    worth_retrying = False


class MissingObjectError(StorageError):
    """Nothing is there under this name."""


class AccessDeniedError(StorageError):
    """It may be there, but not for us."""

    worth_retrying = True


class StorageSetupError(StorageError):
    """Credentials, bucket or endpoint are wrong: nothing under them can work until that is mended."""

    worth_retrying = True


class MissingBucketError(StorageSetupError):
    """There is no such bucket."""


class StorageUnreachableError(StorageError):
    """The server failed or didn't answer, after every try."""

    worth_retrying = True


class SpoolSpaceError(StorageError):
    """No room on disk for a download."""

    worth_retrying = True


_USUAL_PLACES = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or the machine's role"
_RIGHTS = "access denied; the credentials in use need s3:ListBucket, s3:GetObject, s3:PutObject and s3:DeleteObject here"

_BY_CODE: dict[str, tuple[type[StorageError], str]] = {
    "404": (MissingObjectError, "no such object, or no such bucket; check the spelling"),
    "NoSuchKey": (MissingObjectError, "no such object; check the spelling"),
    "NoSuchBucket": (MissingBucketError, "no such bucket; create it, or check its name and storage.endpoint_url"),
    "InvalidBucketName": (StorageSetupError, "not a valid bucket name"),
    "403": (AccessDeniedError, _RIGHTS),
    "AccessDenied": (AccessDeniedError, _RIGHTS),
    "ExpiredToken": (StorageSetupError, "the session's credentials have expired; sign in again"),
    "ExpiredTokenException": (StorageSetupError, "the session's credentials have expired; sign in again"),
    "InvalidToken": (StorageSetupError, "the session token isn't valid; sign in again"),
    "InvalidAccessKeyId": (StorageSetupError, f"the server doesn't know this access key; check {_USUAL_PLACES}"),
    "SignatureDoesNotMatch": (StorageSetupError, f"the secret key doesn't fit the access key; check {_USUAL_PLACES}"),
    "RequestTimeTooSkewed": (StorageSetupError, "this machine's clock differs too much from the server's; set the clock"),
    "PermanentRedirect": (StorageSetupError, "the bucket is in another region; set storage.region"),
    "301": (StorageSetupError, "the bucket is in another region; set storage.region"),
    "AuthorizationHeaderMalformed": (StorageSetupError, "the bucket is in another region; set storage.region"),
    "NotImplemented": (StorageSetupError, "the server doesn't support this request (conditional writes are needed); use a newer server"),
    "SlowDown": (StorageUnreachableError, "the server asked to slow down, after every try; raise storage.max_attempts or use fewer actors"),
}

_BY_CLASS: list[tuple[type[Exception], type[StorageError], str]] = [
    (botocore.NoCredentialsError, StorageSetupError, f"no credentials found; set {_USUAL_PLACES}"),
    (botocore.PartialCredentialsError, StorageSetupError, f"only half of the credentials are set; complete {_USUAL_PLACES}"),
    (botocore.CredentialRetrievalError, StorageSetupError, "credentials couldn't be fetched; sign in again"),
    (botocore.UnauthorizedSSOTokenError, StorageSetupError, "the single sign-on session has ended; sign in again"),
    (botocore.TokenRetrievalError, StorageSetupError, "the single sign-on session has ended; sign in again"),
    (botocore.ProfileNotFound, StorageSetupError, "the profile in AWS_PROFILE isn't in the AWS configuration files"),
    (botocore.ParamValidationError, StorageSetupError, "not a valid bucket name or key"),
    (botocore.SSLError, StorageSetupError, "the server's certificate isn't trusted; check storage.endpoint_url, or set AWS_CA_BUNDLE"),
    (botocore.ConnectTimeoutError, StorageUnreachableError, "no connection within storage.connect_timeout_s; check the network"),
    (botocore.ReadTimeoutError, StorageUnreachableError, "the server fell silent for storage.read_timeout_s, at every try"),
    (botocore.EndpointConnectionError, StorageSetupError, "the server can't be reached (connection refused or unknown host)"),
    (botocore.ProxyConnectionError, StorageSetupError, "the proxy can't be reached; check HTTPS_PROXY"),
    (botocore.ResponseStreamingError, StorageUnreachableError, "the download was cut short, at every try"),
    (botocore.HTTPClientError, StorageUnreachableError, "the connection broke, at every try"),
    (botocore.IncompleteReadError, StorageUnreachableError, "the download was cut short, at every try"),
    (RetriesExceededError, StorageUnreachableError, "the download was cut short, at every try"),
    (S3DownloadFailedError, StorageUnreachableError, "the object changed while it was downloaded; run again"),
]

_BY_ERRNO: dict[int, tuple[type[StorageError], str]] = {
    errno.ENOENT: (MissingObjectError, "no such file; check the spelling"),
    errno.ENOTDIR: (MissingObjectError, "no such file or folder; a part of the path is a file"),
    errno.EISDIR: (StorageError, "this is a folder, not a file"),
    errno.EACCES: (AccessDeniedError, "permission denied for this user"),
    errno.EPERM: (AccessDeniedError, "the file system refuses this (or has no hard links, which a write that must not overwrite needs)"),
    errno.EOPNOTSUPP: (
        StorageError,
        "the file system has no hard links, which a write that must not overwrite needs; choose another output",
    ),
    errno.EROFS: (StorageError, "the file system is read-only"),
    errno.ENOSPC: (SpoolSpaceError, "no space left on the disk"),
    errno.EDQUOT: (SpoolSpaceError, "the disk quota is used up"),
    errno.ENAMETOOLONG: (StorageError, "the name is too long"),
}


@contextmanager
def translated(uri: str, endpoint: str | None = None) -> Iterator[None]:
    """Turn what the operating system and boto3 raise inside the block into a StorageError about `uri`."""
    try:
        yield
    except (botocore.BotoCoreError, botocore.ClientError, Boto3Error, RetriesExceededError, S3DownloadFailedError) as error:
        kind, message = _explain(error)
        endpoint = endpoint or str(getattr(error, "kwargs", {}).get("endpoint_url") or "").split("?")[0]
        at = f" at {_redacted(endpoint)}" if endpoint else ""
        raise kind(f"{uri}: {message}{at}") from None
    except OSError as error:
        kind, message = _BY_ERRNO.get(error.errno or 0, (StorageError, f"{error.strerror or error}"))
        raise kind(f"{uri}: {message}") from None
    except ValueError as error:  # a name that can't be one: a null character, a broken character
        if isinstance(error, InputError):
            raise
        raise StorageError(f"{uri!r}: {_redacted(str(error))}") from None


def http_status(error: botocore.ClientError) -> int:
    """HTTP status of a refused request; 0 when unknown."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _explain(error: Exception) -> tuple[type[StorageError], str]:
    if isinstance(error, botocore.ClientError):
        details = error.response.get("Error", {})
        code = str(details.get("Code", ""))
        if code in _BY_CODE:
            return _BY_CODE[code]
        kind = StorageUnreachableError if http_status(error) >= 500 else StorageError
        return kind, _redacted(f"the server answered {code}: {details.get('Message', '')}")
    for cause, kind, message in _BY_CLASS:
        if isinstance(error, cause):
            return kind, message
    return StorageError, _redacted(f"{type(error).__name__}: {error}")


def _redacted(text: str) -> str:
    text = re.sub(r"//[^/\s@]*@", "//***@", text)
    return re.sub(r"\b(AKIA|ASIA)[A-Z0-9]{12,}\b", r"\1***", text)
