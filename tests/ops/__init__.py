import pytest

pytest.register_assert_rewrite(
    "ops.cases", "ops.logit_function_cases", "ops.against_reference", "ops.group_cases"
)
