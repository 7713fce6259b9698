"""The least that one call per parameter costs: a route that takes a parameter and answers.

    python -m benchmarks.peers.round_trips PORT

`POST /update_named_param/` with the name, the type and the shape, as a
server does that is told of every parameter by itself; it does nothing with them.
"""

import sys

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from benchmarks.processes import end_with_benchmark


class NamedParameter(BaseModel):
    name: str
    dtype: str
    shape: list[int]


app = FastAPI()


@app.get("/health/")
async def health() -> None:
    return None


@app.post("/update_named_param/")
async def update_named_param(body: NamedParameter) -> dict[str, str]:
    return {"message": body.name}


def main() -> None:
    end_with_benchmark()
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")


if __name__ == "__main__":
    main()
