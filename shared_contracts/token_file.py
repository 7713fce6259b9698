"""The server's token in a file, as secrets of containers and services are given."""

from pathlib import Path

from shared_contracts.errors import ContractError


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
