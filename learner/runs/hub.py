"""The Hugging Face Hub, through huggingface_hub: may this person push, and a push of a folder.

    require_hub_access()   before a run: the token is valid and may write to the repository
    push_folder()          a folder as one commit of a model repository

The token is that of `HF_TOKEN`, or of `hf auth login`; no file of a run holds it. Imports
huggingface_hub within functions: most runs push nothing.
"""

from pathlib import Path
from typing import Any

from shared_contracts.errors import ContractError, RunError

_LOGIN = (
    "Set HF_TOKEN to a token that may write (https://huggingface.co/settings/tokens), or log in "
    "with `hf auth login`"
)


def require_hub_access(where: str, repository: str) -> None:
    """Raise ContractError, about `where`, unless the token may write to `repository`.

    The Hub says who the token is of; nothing is created there. A token with rights for single
    repositories is let through: the Hub does not say which.
    """
    import httpx
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ContractError(where, str(error), "Write it like my-name/my-detector") from error
    if get_token() is None:
        raise ContractError(where, f"{repository}, and there is no token of the Hub", _LOGIN)
    try:
        who = _api().whoami()
    except OfflineModeIsEnabled as error:
        found = f"{repository}, and HF_HUB_OFFLINE is set"
        raise ContractError(where, found, "Unset it, or push nothing") from error
    except (httpx.HTTPError, OSError) as error:
        found = f"{constants.ENDPOINT} does not say whose the token is ({error})"
        do = "See that this machine reaches it, or push nothing"
        if isinstance(error, HfHubHTTPError) and error.response.status_code == 401:
            found, do = f"{repository}, and {constants.ENDPOINT} refuses the token", _LOGIN
        raise ContractError(where, found, do) from error
    role = who.get("auth", {}).get("accessToken", {}).get("role")
    if role == "read":
        found = f"{repository}, and the token of {who['name']} may only read"
        raise ContractError(where, found, _LOGIN)
    owners = [who["name"], *(each["name"] for each in who.get("orgs", []))]
    owner, slash, _ = repository.partition("/")
    if slash and role == "write" and owner not in owners:
        raise ContractError(
            where,
            f"{repository}, and the token of {who['name']} may write to repositories of "
            f"{', '.join(owners)}",
            "Name a repository of one of them, or use another token",
        )


def push_folder(folder: Path, repository: str, *, private: bool, message: str) -> str:
    """Commit the files of `folder` to a model repository; returns the address of the commit.

    private: of a repository that is created. Files of the repository that `folder` lacks stay.

    Raises RunError where the Hub does not take it; the repository has all of the commit or none.
    """
    import httpx

    try:
        created = _api().create_repo(repository, private=private, exist_ok=True)
        commit = _api().upload_folder(
            repo_id=created.repo_id, folder_path=folder, commit_message=message
        )
    except (httpx.HTTPError, OSError, ValueError, RuntimeError) as error:
        said = str(error).rstrip(".")
        raise RunError(f"{repository} on the Hub did not take the model: {said}") from error
    return str(commit.commit_url)


def _api() -> Any:
    from importlib.metadata import version

    from huggingface_hub import HfApi

    return HfApi(library_name="rollmatch", library_version=version("rollmatch"))
