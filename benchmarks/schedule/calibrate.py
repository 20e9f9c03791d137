"""The constants of a running engine for `benchmarks.schedule`: `python -m benchmarks.schedule.calibrate URL`.

Asks for so many answers at once, which end at their limit, and fits a decode step of b answers by
`base_s + answer_s * b`. Long prompts give the seconds of a token of prefill. The server must be idle, without
weights of a run, and just started: prompts that it has seen cost it nothing.
"""

import argparse
import asyncio
import json
import statistics
import time
from itertools import count

import aiohttp

from holdfast.protocol.inference import GENERATE_ROUTE

AT_ONCE = (1, 16, 64, 128)
TOKENS = 64
SHORT, LONG = 16, 192
TRIES = 3


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    constants = asyncio.run(measure(parser.parse_args().url.rstrip("/")))
    print(json.dumps({name: round(value, 7) for name, value in constants.items()}))


async def measure(url: str) -> dict[str, float]:
    """Return `base_s`, `answer_s` and `prefill_s` of the engine at `url`."""
    numbers = count()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def post(prompt: int, tokens: int) -> None:
            number = next(numbers)
            # Different first tokens: no two prompts share a prefix.
            first = [10 + number % 50, 10 + number // 50 % 50, 10 + number // 2500 % 50]
            body = {"token_ids": [*first, *[20] * (prompt - 3)], "seeds": [number], "max_tokens": tokens}
            async with session.post(url + GENERATE_ROUTE, json=body) as answer:
                answer.raise_for_status()
                await answer.read()

        async def seconds(answers: int, prompt: int, tokens: int) -> float:
            found = []
            for _ in range(TRIES):
                begin = time.perf_counter()
                await asyncio.gather(*(post(prompt, tokens) for _ in range(answers)))
                found.append(time.perf_counter() - begin)
            return min(found)

        await seconds(8, SHORT, 8)
        steps = {
            answers: (await seconds(answers, SHORT, TOKENS) - await seconds(answers, SHORT, 1)) / (TOKENS - 1)
            for answers in AT_ONCE
        }
        prefill = await seconds(64, LONG, 1) - await seconds(64, SHORT, 1)
    print(", ".join(f"{answers} answers: {1e3 * step:.2f} ms a step" for answers, step in steps.items()))
    fit = statistics.linear_regression(list(steps), list(steps.values()))
    return {"base_s": fit.intercept, "answer_s": fit.slope, "prefill_s": prefill / (64 * (LONG - SHORT))}


if __name__ == "__main__":
    main()
