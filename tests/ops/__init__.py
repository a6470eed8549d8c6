import pytest

pytest.register_assert_rewrite("ops.cases", "ops.tree_op_suite")
