"""A job's settings, each with its unit, default and bound. `pipeline.config` fills them in."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from engine.config import EngineConfig
from pipeline.video.config import MAX_WAIT_S, DecodeConfig

SECRET_REMEDY = (
    "credentials aren't taken from settings; put them in the usual AWS places "
    "(AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE with ~/.aws/credentials, or the machine's role)"
)


class StorageConfig(BaseModel):
    """Where objects are, how patiently they are fetched, and how much disk may be used meanwhile."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    endpoint_url: str | None = Field(
        None, description="Address of an S3-compatible server, e.g. http://127.0.0.1:9000; default: AWS, or AWS_ENDPOINT_URL."
    )
    region: str | None = Field(None, description="Region of the buckets; default: what the AWS environment says, else us-east-1.")
    addressing_style: Literal["auto", "path", "virtual"] = Field(
        "auto",
        description="How a bucket is put into the address: path (host/bucket, for most S3-compatible servers) or virtual (bucket.host).",
    )
    spool_dir: str | None = Field(
        None,
        description="Folder that videos are downloaded to while they are read; default: a private folder under the system's temporary one.",
    )
    spool_bytes: int = Field(
        64 * 2**30, ge=1, description="Most bytes all downloads on one machine may take together in spool_dir; a larger video is refused."
    )
    spool_wait_s: float = Field(
        600.0, ge=0.0, le=MAX_WAIT_S, description="Seconds to wait for other videos to leave room in spool_dir before giving up."
    )
    models_dir: str | None = Field(
        None,
        description="Folder that a checkpoint under s3:// is fetched into, once a node; default: a private folder under the system's temporary one.",
    )
    max_attempts: int = Field(5, ge=1, le=20, description="Tries of one request, the first included, with growing pauses between them.")
    connect_timeout_s: float = Field(10.0, gt=0.0, le=MAX_WAIT_S, description="Seconds to wait for a connection.")
    read_timeout_s: float = Field(60.0, gt=0.0, le=MAX_WAIT_S, description="Seconds without a byte after which a request has failed.")
    download_threads: int = Field(4, ge=1, le=64, description="Parallel range requests of one download.")
    verify_etag: bool = Field(
        True, description="Compare a download with the object's ETag where that is an MD5. Switch off for servers whose ETag isn't one."
    )

    @field_validator("endpoint_url")
    @classmethod
    def _plain_address(cls, value: str | None) -> str | None:
        if value is None:
            return value
        parts = urlsplit(value)
        if parts.username or parts.password:
            raise ValueError(f"must not hold a user name or a password: {SECRET_REMEDY}")
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError("must be an address such as https://s3.example.org or http://127.0.0.1:9000")
        return value.rstrip("/")


class PoolConfig(BaseModel):
    """How many engines run at once, on what, and how often a video is tried."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    min_actors: int = Field(1, ge=1, description="Engines that are always up.")
    max_actors: int | None = Field(None, ge=1, description="Most engines at once; default: as many as the cluster has room for.")
    initial_actors: int | None = Field(None, ge=1, description="Engines started at the beginning; default: min_actors.")
    num_gpus: float | None = Field(
        None,
        ge=0.0,
        description="GPUs of one engine; a fraction shares a GPU, 0 runs on CPU. Default: 1 where engine.device is cuda or the cluster has "
        "GPUs (a cluster in RAY_ADDRESS is waited for when engine.dtype is a half precision), else 0.",
    )
    num_cpus: float = Field(1.0, ge=0.0, description="CPUs that Ray sets aside for one engine.")
    threads: int | None = Field(None, ge=1, description="Threads PyTorch may use in one engine; default: num_cpus rounded up.")
    cluster_wait_s: float = Field(
        900.0,
        ge=0.0,
        le=MAX_WAIT_S,
        description="Seconds to wait for nodes of the cluster in RAY_ADDRESS to start and join until the smallest pool fits.",
    )
    max_attempts: int = Field(3, ge=1, description="Tries of one video, counting those that killed the process, before it is quarantined.")

    @model_validator(mode="after")
    def _ordered(self) -> PoolConfig:
        if self.max_actors is not None and self.max_actors < self.min_actors:
            raise ValueError(f"max_actors={self.max_actors} must be at least min_actors={self.min_actors}")
        if self.initial_actors is not None and not self.min_actors <= self.initial_actors <= (self.max_actors or self.initial_actors):
            raise ValueError(
                f"initial_actors={self.initial_actors} must lie between min_actors={self.min_actors} and max_actors={self.max_actors}"
            )
        if self.num_gpus is not None and self.num_gpus > 1 and self.num_gpus != int(self.num_gpus):
            raise ValueError(f"num_gpus={self.num_gpus} must be a fraction up to 1 or a whole number")
        return self


class CachesConfig(BaseModel):
    """What is kept of a video once it has been read, for later questions and for whoever takes it over."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    retain: Literal["all", "none"] = Field(
        "all",
        description="all: keep each video's compressed cache, so that it can be asked again unwatched. A cache tells what the video shows: guard it alike.",
    )
    uri: str | None = Field(None, description="Folder or s3:// prefix for caches, which jobs may share; default: `caches` under output.")
    ttl_s: float | None = Field(None, gt=0.0, description="Seconds after which a cache isn't used any more and is removed; default: never.")
    max_bytes: int | None = Field(
        None, ge=1, description="Most bytes of caches under uri; the oldest are removed first. Default: no limit."
    )
    missing: Literal["watch", "refuse"] = Field(
        "watch", description="A video without a usable cache: watch it, or refuse it with the reason (what `jobs.ask` does)."
    )
    checkpoint_every_s: float | None = Field(
        120.0, gt=0.0, description="Store how far a video has been read after this many seconds of work; null switches it off."
    )
    checkpoint_every_blocks: int | None = Field(None, ge=1, description="Store it after this many blocks; default: by time alone.")


class LogConfig(BaseModel):
    """What is told while a job runs."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least serious line that is written.")
    format: Literal["text", "json"] = Field("text", description="text for people, json (an object a line) for log collectors.")
    progress: Literal["auto", "live", "lines", "off"] = Field(
        "auto", description="live rewrites one line, lines writes one now and then; auto: live on a terminal, lines elsewhere."
    )
    progress_interval_s: float = Field(60.0, gt=0.0, le=MAX_WAIT_S, description="Seconds between two progress lines.")


class JobConfig(BaseModel):
    """Watch videos, answer questions about them, write Parquet."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    manifest: str | None = Field(None, description="What to watch and ask: a Parquet, JSON Lines or CSV file, local or s3://.")
    videos: str | None = Field(
        None, description="Instead of a manifest: a folder or s3:// prefix whose videos all get the same questions, or one video."
    )
    questions: str | None = Field(
        None, description="Questions for every file under `videos`: JSON, JSON Lines, CSV, Parquet, or text with one question a line."
    )
    output: str = Field(description="Folder or s3:// prefix for the result tables.")
    limit: int | None = Field(None, ge=1, description="Take only the first N videos.")
    only: list[str] = Field([], description="Take only these video ids; may be repeated.")
    dry_run: bool = Field(False, description="Check everything, say what would be done, and stop.")
    retry_quarantined: bool = Field(False, description="Try the videos again that an earlier start has set aside.")
    on_changed_settings: Literal["refuse", "restart"] = Field(
        "refuse",
        description="Output that holds answers made with other settings: refuse, or watch again and replace its tables (restart).",
    )
    take_over: bool = Field(False, description="Start although another job holds this output; that one stops within seconds.")
    trace: bool = Field(False, description="Also write the trace table: a row for every block of every video.")
    engine: EngineConfig = Field(default_factory=EngineConfig, description="The model and its memory.")
    decode: DecodeConfig = Field(default_factory=DecodeConfig, description="Which frames are taken from a video.")
    storage: StorageConfig = Field(default_factory=StorageConfig, description="Object storage and the download spool.")
    pool: PoolConfig = Field(default_factory=PoolConfig, description="The pool of engines.")
    caches: CachesConfig = Field(default_factory=CachesConfig, description="What is kept of videos that were read.")
    log: LogConfig = Field(default_factory=LogConfig, description="Log lines and progress.")

    @model_validator(mode="after")
    def _one_input(self) -> JobConfig:
        if self.manifest is not None and (self.videos is not None or self.questions is not None):
            raise ValueError("manifest can't be combined with videos and questions; give one or the other")
        if self.manifest is None and (self.videos is None or self.questions is None):
            raise ValueError("nothing to watch: give manifest, or both videos and questions")
        return self
