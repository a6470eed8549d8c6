import pytest

pytest.register_assert_rewrite("heads.support")
