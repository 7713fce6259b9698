"""The server's token: in the environment, or in a file as containers and services are given it."""

from collections.abc import Mapping
from pathlib import Path

from shared_contracts.errors import ContractError
from shared_contracts.server_info import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE


def given_token(environment: Mapping[str, str]) -> str | None:
    """What calls of servers carry: of ROLLOUT_SERVER_TOKEN or ROLLOUT_SERVER_TOKEN_FILE.

    None where neither is set. Raises ContractError for a token that no header can carry, a
    file that cannot be read, and two tokens that differ.
    """
    token = environment.get(TOKEN_VARIABLE, "").strip()
    if token:
        token = checked_token(token, TOKEN_VARIABLE)
    if path := environment.get(TOKEN_FILE_VARIABLE):
        in_file = read_token_file(Path(path), TOKEN_FILE_VARIABLE)
        if token and token != in_file:
            raise ContractError(
                TOKEN_FILE_VARIABLE,
                f"{path} holds another token than {TOKEN_VARIABLE}",
                "Set one of the two",
            )
        token = in_file
    return token or None


def read_token_file(path: Path, where: str) -> str:
    """The token in `path`, without white space around it.

    where: the option or variable that names the file. Raises ContractError for a file that
    cannot be read and for a token that no HTTP header carries.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ContractError(
            where, f"{path} cannot be read ({reason})", "Name a readable text file"
        ) from None
    return checked_token(content, where)


def checked_token(text: str, where: str) -> str:
    """`text` without white space around it; raises ContractError for what is no token."""
    token = text.strip()
    if not token:
        raise ContractError(where, "the token is empty", "Write one, such as 32 random characters")
    if not all("!" <= letter <= "~" for letter in token):
        raise ContractError(
            where,
            "the token holds white space or other characters a header does not carry",
            "Use letters and digits",
        )
    return token
