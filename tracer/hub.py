"""config.json of a Hugging Face repository: from the Hub cache, else from the Hub. Nothing else is ever downloaded.

The variables of huggingface_hub (HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE, TRANSFORMERS_OFFLINE, HF_HOME, HF_HUB_CACHE,
HF_HUB_ETAG_TIMEOUT) are read when a config is asked for. huggingface_hub reads most of them once, when it is imported,
so the values are handed to it as arguments.

Source: the cache's layout and the error codes of the Hub are those of huggingface_hub's file_download.py and
utils/_http.py (`hf_hub_download`, `hf_raise_for_status`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from metapeak.tracer.errors import ModelNotFound

CONFIG_NAME = "config.json"
DEFAULT_ENDPOINT = "https://huggingface.co"
DEFAULT_TIMEOUT_SECONDS = 10.0  # huggingface_hub's DEFAULT_ETAG_TIMEOUT
_TRUE = {"1", "ON", "YES", "TRUE"}  # huggingface_hub's ENV_VARS_TRUE_VALUES


@dataclass(frozen=True, kw_only=True, slots=True)
class HubConfig:
    """Where a repository's config.json lies on disk now, where it came from, and its commit."""

    path: Path
    source: str  # "hub cache" or "hub"
    revision: str


def offline_variable() -> str | None:
    """The variable that switches the Hub off, or None when it is on."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return next((name for name in names if os.environ.get(name, "").upper() in _TRUE), None)


def hub_endpoint() -> str:
    """The address of the Hub, without a slash at its end."""
    return (os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")


def hub_cache_folder() -> Path:
    """The folder of the Hub cache, by huggingface_hub's rules."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(name):
            return Path(os.path.expandvars(os.environ[name])).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    return Path(os.path.expandvars(home)).expanduser() / "hub"


def find_config(repository: str, revision: str | None, *, catalogue: str, hint: str) -> HubConfig:
    """config.json of a repository at a revision (None: main), from the cache or else from the Hub.

    `catalogue` (what the built-in catalogue had) and `hint` (what else to try) become part of the message.
    Raises ModelNotFound: offline and not cached, no such repository or revision, no config.json, gated, no answer.
    """
    cached = _cached_config(repository, revision)
    if cached is not None:
        return cached
    asked = f"Model '{repository}{'@' + revision if revision else ''}' was not found"
    looked = f"{catalogue}; it is not in the Hub cache ({hub_cache_folder()})"
    variable = offline_variable()
    if variable:
        raise ModelNotFound(
            f"{asked}: {looked}; the Hub was not asked because {variable} is set. {hint} "
            f"Or unset {variable}, or give a local config.json."
        )
    return _downloaded_config(repository, revision, f"{asked}: {looked}", hint)


def _cached_config(repository: str, revision: str | None) -> HubConfig | None:
    folder = hub_cache_folder() / f"models--{repository.replace('/', '--')}"
    revision = revision or "main"
    try:
        reference = folder / "refs" / revision
        commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else revision
        path = folder / "snapshots" / commit / CONFIG_NAME
        return HubConfig(path=path, source="hub cache", revision=commit) if path.is_file() else None
    except (OSError, UnicodeDecodeError):
        return None  # an unreadable cache is no cache: the Hub is asked, and says what is wrong with writing there


def _downloaded_config(repository: str, revision: str | None, looked: str, hint: str) -> HubConfig:
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_download, hf_hub_url

    endpoint, timeout = hub_endpoint(), _timeout_seconds()
    token = _token()
    try:
        # hf_hub_download retries for 25 seconds when nobody answers; one question first fails at once.
        url = hf_hub_url(repository, CONFIG_NAME, revision=revision, endpoint=endpoint)
        if get_hf_file_metadata(url, token=token or False, timeout=timeout, endpoint=endpoint).commit_hash is None:
            raise errors.FileMetadataError("the answer lacks the X-Repo-Commit header of a Hub; check HF_ENDPOINT")
        path = hf_hub_download(
            repository,
            CONFIG_NAME,
            revision=revision,
            cache_dir=hub_cache_folder(),
            endpoint=endpoint,
            token=token or False,
            etag_timeout=timeout,
        )
    except Exception as error:  # the transport's exceptions have no base class that huggingface_hub promises
        reason = _reason(error, repository, revision, endpoint, token is not None)
        raise ModelNotFound(f"{looked}; {reason} {hint}") from error
    return HubConfig(path=Path(path), source="hub", revision=Path(path).parent.name)


def _token() -> str | None:
    """The token that huggingface_hub would send: HF_TOKEN, else the one stored at login."""
    from huggingface_hub import get_token

    if os.environ.get("HF_HUB_DISABLE_IMPLICIT_TOKEN", "").upper() in _TRUE:
        return None
    return get_token()


def _timeout_seconds() -> float:
    try:
        return float(os.environ["HF_HUB_ETAG_TIMEOUT"])
    except (KeyError, ValueError):
        return DEFAULT_TIMEOUT_SECONDS


def _reason(error: Exception, repository: str, revision: str | None, endpoint: str, has_token: bool) -> str:
    """What went wrong at the Hub, and what to do about it, in one or two sentences."""
    from huggingface_hub import errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    sent = "the token that was sent has no access" if has_token else "no token was sent (set HF_TOKEN)"
    if isinstance(error, errors.GatedRepoError):
        return (
            f"it is gated on the Hub and {sent}. Accept its terms at {endpoint}/{repository} and set HF_TOKEN to a "
            "token of that account, or give a local config.json."
        )
    if isinstance(error, errors.DisabledRepoError):
        return f"its repository at {endpoint} is disabled."
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"the Hub at {endpoint} has no such repository, or it is private and {sent}."
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the repository exists at {endpoint} but has no revision '{revision}'; try without @{revision}."
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "the Hub was not asked because it is switched off."
    if isinstance(error, errors.RemoteEntryNotFoundError) or status == 404:
        return (
            f"the repository exists at {endpoint} but has no {CONFIG_NAME} at revision '{revision or 'main'}' "
            "(adapters, GGUF files and diffusion pipelines have none; name the base model)."
        )
    if status == 401:
        return f"the Hub at {endpoint} refused the token; check HF_TOKEN." if has_token else f"{endpoint}: {sent}."
    if status is not None:
        return f"the Hub at {endpoint} answered with HTTP status {status}."
    if isinstance(error, errors.FileMetadataError):
        return f"{endpoint} does not answer as a Hub does: {one_line(error)}."
    if isinstance(error, OSError) and not isinstance(error, errors.LocalEntryNotFoundError):
        return f"what the Hub sent cannot be stored ({type(error).__name__}: {one_line(error)})."
    return (
        f"the Hub at {endpoint} could not be reached ({type(error).__name__}: {one_line(error)}); check the network "
        "and HF_ENDPOINT, or set HF_HUB_OFFLINE=1 to work without it."
    )


def one_line(error: BaseException) -> str:
    """The message of an exception on one line, without a full stop at its end."""
    return " ".join(str(error).split()).rstrip(".") or "no message"
