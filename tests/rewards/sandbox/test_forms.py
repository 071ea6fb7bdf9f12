"""The tests of public data sets, in their true forms: a right program is worth 1 and a wrong one 0.

Covers lrl/rewards/sandbox/calls.py.
"""

import base64
import json

import pytest

from tests.rewards.test_code import code

ADD = "def add(a, b):\n    return a + b\n"
SUBTRACT = "def add(a, b):\n    return a - b\n"
TWO_SUM = (
    "class Solution:\n    def twoSum(self, nums, target):\n"
    "        for i, x in enumerate(nums):\n            for j in range(i):\n"
    "                if nums[j] + x == target:\n                    return (j, i)\n"
)
WRONG_SUM = "class Solution:\n    def twoSum(self, nums, target):\n        return [0, 2]\n"
READ = "print(sum(map(int, input().split())))"
WRONG_READ = "print(3)"
ADDS, READS, TWO_SUMS = (ADD, SUBTRACT), (READ, WRONG_READ), (TWO_SUM, WRONG_SUM)
IO = [["1 2\n", "3\n"], ["4 5", "9"]]
LISTS = {"inputs": [left for left, _ in IO], "outputs": [right for _, right in IO]}
CALLS = {"fn_name": "add", "inputs": [[1, 2], [4, 5]], "outputs": [[3], [9]]}
LEETCODE = [
    {"input": "[2, 7, 11, 15]\n9", "output": "[0, 1]", "testtype": "functional"},
    {"input": "[3, 2, 4]\n6", "output": "[1, 2]", "testtype": "functional"},
]
ASSERTS = ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]
HUMANEVAL = (
    "\n\nMETADATA = {\n    'author': 'jt',\n    'dataset': 'test'\n}\n\n\ndef check(candidate):\n"
    "    assert candidate(1, 2) == 3\n    assert abs(candidate(0.5, 1) - 1.5) < 1e-6\n\n"
)
CHECK_METHOD = "def check(candidate):\n    assert candidate(nums = [3, 3], target = 6) == (0, 1)\n"
UNITTEST = (
    "import unittest\n\nclass TestAdd(unittest.TestCase):\n    def setUp(self):\n        self.x = 1\n\n"
    "    def test_sum(self):\n        self.assertEqual(add(self.x, 2), 3)\n\n"
    "    def test_error(self):\n        with self.assertRaises(TypeError):\n            add(1, 'a')\n\n"
)
KODCODE = (
    "from solution import add\n\ndef test_sum():\n    assert add(1, 2) == 3\n\ndef test_error():\n"
    "    try:\n        add(1, 'a')\n    except TypeError:\n        return\n    assert False\n"
)
FORMS = {
    "pairs as lists": (IO, READS),
    "APPS, JSON": (json.dumps(LISTS), READS),
    "APPS, lines": ({"inputs": [["1 2"]], "outputs": [["3", ""]]}, (READ, "print(4)")),
    "APPS, calls": (json.dumps(CALLS), ADDS),
    "TACO, calls": (CALLS | {"outputs": [3, 9]}, ADDS),
    "APPS, a method": (
        {"fn_name": "twoSum", "inputs": [[[3, 2, 4], 6]], "outputs": [[[1, 2]]]},
        TWO_SUMS,
    ),
    "LiveCodeBench, stdin": (
        json.dumps([{"input": a, "output": b, "testtype": "stdin"} for a, b in IO]),
        READS,
    ),
    "LiveCodeBench, functional": (
        json.dumps(LEETCODE),
        TWO_SUMS,
        {"metadata": '{"func_name": "twoSum"}'},
    ),
    "DeepCoder": ([each | {"metadata": {"func_name": "twoSum"}} for each in LEETCODE], TWO_SUMS),
    "SYNTHETIC-1": (
        [{"type": "function_call", "fn_name": "add", "input": [1, 2], "output": [3]}],
        ADDS,
    ),
    "CodeContests": ({"input": LISTS["inputs"], "output": LISTS["outputs"]}, READS),
    "a list of JSON": ([json.dumps({"input": a, "output": b}) for a, b in IO], READS),
    "MBPP": (ASSERTS, ADDS),
    "asserts of a CSV": (repr(ASSERTS), ADDS),
    "MBPP 126": (
        ["assert sum(10, 15) == 6"],
        ("def sum(a, b): return 6", "def sum(a, b): return 5"),
    ),
    "words that are names elsewhere": (["assert add('mock ', 'async') == 'mock async'"], ADDS),
    "MBPP without import": (["assert math.isclose(add(0.1, 0.2), 0.3)"], ADDS),
    "HumanEval": (HUMANEVAL, ADDS, {"entry_point": "add"}),
    "HumanEval, called": (HUMANEVAL + "check(add)\n", ADDS),
    "LeetCodeDataset": (CHECK_METHOD, TWO_SUMS, {"entry_point": "Solution().twoSum"}),
    "KodCode": (KODCODE, ADDS),
    "a star": ("from solution import *\n\ndef test_add():\n    assert add(1, 2) == 3\n", ADDS),
    "a class of pytest": (
        "class TestAdd:\n    def test_it(self):\n        assert add(1, 2) == 3\n",
        ADDS,
    ),
    "unittest": (UNITTEST + "unittest.main()\n", ADDS),
    "BigCodeBench": (UNITTEST + "if __name__ == '__main__':\n    unittest.main()\n", ADDS),
}
"""The column `tests`, a right program with a wrong one, and other columns."""


@pytest.mark.parametrize("form", FORMS)
def test_a_right_program_is_worth_1_and_a_wrong_one_0_in_the_public_forms(form):
    tests, (right, wrong), *others = FORMS[form]
    row = {"tests": tests} | dict(*others)
    judge = code()
    assert judge("", right, **row) == 1.0
    assert judge("", wrong, **row) == 0.0


@pytest.mark.parametrize(
    ("tests", "named"),
    [
        (base64.b64encode(b"a pickle of tests").decode(), "invalid|neither"),
        ("eJxrYJmcAAAJJgHs", "invalid|neither"),
        ("# add(1, 2) == 3", "neither an assert nor a call"),
        ("add(1, 2) == 3\nadd(2, 2) == 4", "comparison without an assert"),
        (["add(1, 2) == 3"], "comparison without an assert"),
        ("def check(candidate):\n    assert candidate(1) == 2", "entry_point"),
        (LEETCODE, "call a function: each needs its name"),
        ({"inputs": ["1"], "outputs": []}, "shorter than"),
        ({"question": "1"}, "KeyError"),
        ({"inputs": "12", "outputs": "34"}, "have to be lists"),
        ("def test_it(request):\n    assert 1", "`test_it` has an argument, `request`"),
        ("def test_it(capsys):\n    assert add(1, 2) == 3", "capsys"),
        ("@fixture\ndef two():\n    return 2\nassert add(1, 1) == 2", "`fixture`"),
        ("async def test_it():\n    assert await add(1, 2) == 3", "asyncio"),
        ("class B(A):\n    pass\nassert B().f() == 1", "inherits"),
        ("[]", "has no tests"),
        ("Add the numbers.", "invalid syntax"),
        ([{"input": 1, "output": "1"}], "have to be lists, or texts"),
        *((value, "the column `tests`") for value in ("", [], None, 3, ["assert ("])),
    ],
)
def test_a_form_that_no_program_could_be_judged_by_is_refused_by_name(tests, named):
    for call in (code().check_row, lambda row: code()("", "x = 1", **row)):
        with pytest.raises(ValueError, match=named):
            call({"tests": tests})


@pytest.mark.parametrize(
    "tests",
    [
        "assert True",
        [["1", ""]],
        "try:\n    assert add(1, 2) == 3\nexcept Exception:\n    pass",
        "import unittest\nclass T(unittest.TestCase):\n    @unittest.skip('')\n"
        "    def test_it(self):\n        self.assertEqual(add(1, 2), 3)",
        "def add(a, b):\n    return a + b\nassert add(1, 2) == 3",
    ],
)
def test_tests_that_an_empty_program_passes_are_no_tests_before_a_run_and_no_reward(tests):
    judge = code()
    for call in (judge.check_row, lambda row: judge("", ADD, **row)):
        with pytest.raises(ValueError, match="an empty program passes them"):
            call({"tests": tests})


def test_tests_that_lack_a_module_are_an_error_and_not_a_zero():
    judge = code()
    tests = "from no_such_module import add\ndef test_it():\n    assert add(1, 2) == 3"
    for call in (judge.check_row, lambda row: judge("", ADD, **row)):
        with pytest.raises(ValueError, match="No module named 'no_such_module'"):
            call({"tests": tests})
    lacking = "def add(a, b):\n    import no_such_module"
    assert judge("", lacking, tests=ASSERTS) == 0.0  # the program's own fault


VALUES = (
    "from collections import *\nfrom fractions import Fraction\nimport datetime, decimal\n"
    "P = namedtuple('P', 'x y')\n"
    "def f():\n    return [Counter('aab'), deque([1]), OrderedDict(a=1), {1, 2}, 1 + 2j, Fraction(1, 2),"
    " b'a\\xff', datetime.date(2020, 1, 2), P(1, 2), range(3), None, float('inf'), 10**5000, '\\ud83d',"
    " decimal.Decimal('0.1'), frozenset([1]), True]\n"
)
OBJECTS = {
    "values": (VALUES, VALUES.replace("def f", "def g") + "assert f() == g() and f()[8].y == 2"),
    "a list changed in place": (
        "def f(x):\n    x.sort()\n    return x",
        "x = [3, 1]\nassert f(x) is x and x == [1, 3]",
    ),
    "objects": (
        "class V:\n    def __init__(self, x): self.x = x\n    def __add__(self, o): return V(self.x + o.x)\n"
        "    def __mul__(self, n): return V(self.x * n)\n"
        "    def __eq__(self, o): return self.x == o.x\n    def __len__(self): return self.x\n"
        "    def __str__(self): return f'V{self.x}'",
        "assert V(1) + V(2) == V(3) != V(4)\nassert (V(1) * 4).x == len(V(4)) == 4\n"
        "assert f'{V(2)}' == 'V2' and isinstance(V(1), V)\nv = V(1)\nv.x = 5\nassert len(v) == 5",
    ),
    "exceptions": (
        "class E(ValueError):\n    pass\ndef f(x): raise E('no', x)",
        "try:\n    f(1)\nexcept E as error:\n    assert error.args == ('no', 1)\nelse:\n    assert False\n"
        "assert issubclass(E, ValueError)",
    ),
    "generators": ("def f(n): yield from range(n)", "assert list(f(3)) == [0, 1, 2]"),
    "callbacks": ("def f(g, x): return g(g(x))", "assert f(lambda x: x + 3, 1) == 7"),
    "objects of the tests": (
        "def total(node): return node.value + (total(node.next) if node.next else 0)",
        "class Node:\n    def __init__(self, value, next=None):\n        self.value, self.next = value, next\n"
        "assert total(Node(1, Node(2))) == 3",
    ),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_what_a_program_takes_and_returns_is_as_in_one_process(name):
    program, tests = OBJECTS[name]
    found = code().verdict(program, tests=tests)
    assert found.passed == found.tests > 0, found.reason
