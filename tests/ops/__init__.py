import pytest

pytest.register_assert_rewrite("ops.cases", "ops.logit_function_cases", "ops.tree_op_suite")
