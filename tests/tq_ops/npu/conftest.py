"""What the tests of emitted C++ share."""

import pytest
from emitted_programs import compile_all, compile_store, shared
from planted_programs import StridedWhere


@pytest.fixture(scope="session")
def emitted(tmp_path_factory, worker_id):
    """The C++ of tiny's programs: program -> path -> text."""
    return shared(tmp_path_factory, worker_id, "emitted-tiny", lambda: compile_all("tiny"))


@pytest.fixture(scope="session")
def emitted_strided_where(tmp_path_factory, worker_id):
    """The C++ of a store program whose `where` takes strided views."""
    return shared(tmp_path_factory, worker_id, "emitted-strided", lambda: compile_store(StridedWhere(2)))
