"""The Hugging Face Hub, by huggingface_hub.

The token is that of `HF_TOKEN` or `hf auth login`; no file of a run has it. Functions import
huggingface_hub, because most runs push nothing.
"""

from pathlib import Path
from typing import Any

from learner.config.training import repository_fault
from shared_contracts.errors import ContractError, RunError

_LOGIN = (
    "Set HF_TOKEN to a token that may write (https://huggingface.co/settings/tokens), or log in "
    "with `hf auth login`"
)


def require_hub_access(where: str, repository: str) -> None:
    """Raise ContractError, about `where`, unless the token may write to `repository`.

    The check reads the owner of the token and creates nothing. A token for single repositories
    passes, because the Hub does not list them.
    """
    import httpx

    if (fault := repository_fault(repository)) is not None:
        raise ContractError(where, fault, "Write it like my-name/my-detector")
    try:
        owner_info = _api().whoami()
    except (httpx.HTTPError, OSError) as error:  # no token, too
        found = f"{repository}, and the Hub cannot check a token of yours ({error})"
        raise ContractError(where, found, _LOGIN) from error
    user, role = owner_info["name"], owner_info.get("auth", {}).get("accessToken", {}).get("role")
    if role == "read":
        raise ContractError(where, f"{repository}, and the token of {user} may only read", _LOGIN)
    owners = [user, *(each["name"] for each in owner_info.get("orgs", []))]
    if role == "write" and "/" in repository and repository.partition("/")[0] not in owners:
        found = f"{repository}, and the token of {user} may write to those of {', '.join(owners)}"
        raise ContractError(where, found, "Name one of theirs, or use another token")


def push_folder(folder: Path, repository: str, *, private: bool, message: str) -> str:
    """Commit the files of `folder` to a model repository; returns the URL of the commit.

    Other files of the repository stay. private: whether a new repository is private.

    Raises RunError if the Hub refuses it; the repository has all of the commit or none.
    """
    import httpx

    try:
        created = _api().create_repo(repository, private=private, exist_ok=True)
        commit = _api().upload_folder(
            repo_id=created.repo_id, folder_path=folder, commit_message=message
        )
    except (httpx.HTTPError, OSError, ValueError, RuntimeError) as error:
        cause = str(error).rstrip(".")
        raise RunError(f"the push to {repository} on the Hub failed: {cause}") from error
    return str(commit.commit_url)


def _api() -> Any:
    from importlib.metadata import version

    from huggingface_hub import HfApi

    return HfApi(library_name="rollmatch", library_version=version("rollmatch"))
