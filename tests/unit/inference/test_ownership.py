"""A server has one owner: who may push to it, when that ends, and who is told what."""

import pytest

from holdfast.inference.access import Ownership, RequestError
from holdfast.protocol.inference import Owner

MINE, OTHER = Owner("mine", "node:/mine"), Owner("other", "node:/other")
LEASE_S = 90.0


class Clock:
    """A clock that a test sets."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ownership(clock: Clock) -> Ownership:
    return Ownership(LEASE_S, clock=clock)


def owner(ownership: Ownership) -> str | None:
    status = ownership.status()
    return None if status is None else status.run_id


def test_every_sign_of_life_of_the_owner_counts_and_of_nobody_else(ownership: Ownership, clock: Clock) -> None:
    ownership.claim(MINE)
    clock.now += 60
    ownership.renew("mine")
    clock.now += 60
    ownership.renew("other")
    assert owner(ownership) == "mine"
    clock.now += 31
    assert owner(ownership) is None
    # It was only silent, and nobody took the server meanwhile.
    ownership.renew("mine")
    assert owner(ownership) == "mine"


def test_the_same_run_and_the_next_in_its_directory_take_it_at_once(ownership: Ownership) -> None:
    ownership.claim(MINE)
    ownership.claim(Owner("mine", "node:/moved"))
    assert owner(ownership) == "mine"
    ownership.claim(Owner("begun anew", "node:/moved"))
    assert owner(ownership) == "begun anew"
    ownership.release(OTHER)
    assert owner(ownership) == "begun anew", "nobody else gives it back"
    ownership.release(Owner("begun anew", "node:/moved"))
    ownership.claim(None)
    assert owner(ownership) is None, "who names no run owns nothing"


def test_a_server_of_one_run_is_that_of_no_other_for_good(clock: Clock) -> None:
    ownership = Ownership(LEASE_S, reserved=MINE, clock=clock)
    clock.now += 100 * LEASE_S
    ownership.release(MINE)
    with pytest.raises(RequestError, match="was started for that run alone"):
        ownership.claim(OTHER)
    status = ownership.status()
    assert status is not None and (status.run_id, status.lease_s) == ("mine", None)
