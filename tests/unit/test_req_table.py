"""scripts/req_table: rules and scenarios of the document against the tests."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "req_table"
DOCUMENT = "# Rules\n\n- `AB-01` First.\n- `AB-02` Second.\n- `CD-01` Third.\n"


def req_table(root: Path, document: str, test_file: str) -> subprocess.CompletedProcess[str]:
    (root / "docs").mkdir()
    (root / "docs" / "requirements.md").write_text(document)
    (root / "tests").mkdir()
    (root / "tests" / "test_a.py").write_text(test_file)
    return subprocess.run(
        [sys.executable, SCRIPT, root], capture_output=True, text=True, check=False
    )


def mark(*ids: str) -> str:
    return f"pytest.mark.req({', '.join(map(repr, ids))})"


def test_each_rule_is_shown_with_its_tests_and_the_rest_at_the_end(tmp_path: Path) -> None:
    tests = (
        f"@{mark('AB-01', 'CD-01')}\ndef test_one(): ...\n@{mark('AB-01')}\ndef test_two(): ...\n"
    )
    done = req_table(tmp_path, DOCUMENT, tests)
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        "AB-01       tests/test_a.py::test_one",
        "            tests/test_a.py::test_two",
        "CD-01       tests/test_a.py::test_one",
        "",
        "2 of 3 rules have a test.",
        "Without a test: AB-02",
    ]


def test_marks_of_classes_modules_and_parameters_count(tmp_path: Path) -> None:
    tests = f"""
pytestmark = [{mark("AB-01")}]
@{mark("AB-02")}
class TestThing:
    @pytest.mark.parametrize("x", [pytest.param(1, marks={mark("CD-01")})])
    def test_it(self, x): ...
"""
    done = req_table(tmp_path, DOCUMENT, tests)
    assert done.stdout.splitlines()[:3] == [
        "AB-01       tests/test_a.py",
        "AB-02       tests/test_a.py::TestThing",
        "CD-01       tests/test_a.py::TestThing::test_it",
    ]


def test_text_that_looks_like_a_mark_is_no_mark(tmp_path: Path) -> None:
    tests = f"# @{mark('ZZ-09')}\ndef test_one():\n    '@{mark('ZZ-08')}'\n"
    done = req_table(tmp_path, DOCUMENT, tests.replace("'ZZ-08'", '"ZZ-08"'))
    assert done.returncode == 0
    assert "0 of 3 rules have a test." in done.stdout


def test_an_unknown_rule_fails_and_names_the_test(tmp_path: Path) -> None:
    done = req_table(tmp_path, DOCUMENT, f"@{mark('AB-03')}\ndef test_one(): ...\n")
    assert done.returncode == 1
    assert "tests/test_a.py::test_one (line 1): unknown rule AB-03" in done.stderr


def test_a_rule_listed_twice_fails(tmp_path: Path) -> None:
    done = req_table(tmp_path, DOCUMENT + "- `AB-01` Again.\n", "")
    assert done.returncode == 1
    assert "AB-01 is listed twice" in done.stderr


def test_a_mark_that_cannot_be_read_fails(tmp_path: Path) -> None:
    done = req_table(tmp_path, DOCUMENT, "@pytest.mark.req(RULE)\ndef test_one(): ...\n")
    assert done.returncode == 1
    assert "tests/test_a.py::test_one (line 1): a mark without a literal id" in done.stderr


SCENARIOS = "\n## Scenarios\n\n- Geometry-first, 2 ways (000, 004)\n- A second one (002)\n"


def test_a_scenario_has_the_test_of_its_name(tmp_path: Path) -> None:
    tests = "class TestIt:\n    async def test_geometry_first_2_ways(self): ...\n"
    done = req_table(tmp_path, DOCUMENT + SCENARIOS, tests)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-2:] == [
        "1 of 2 scenarios have a test.",
        "Without a test: A second one",
    ]


def test_a_scenario_listed_twice_fails(tmp_path: Path) -> None:
    done = req_table(tmp_path, DOCUMENT + SCENARIOS + "- A second one (003)\n", "")
    assert done.returncode == 1
    assert "A second one is listed twice" in done.stderr


def test_a_scenario_has_the_test_with_its_mark(tmp_path: Path) -> None:
    tests = '@pytest.mark.scenario("A second one", "Geometry-first, 2 ways")\ndef test_b(): ...\n'
    done = req_table(tmp_path, DOCUMENT + SCENARIOS, tests)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "2 of 2 scenarios have a test."


def test_a_mark_of_no_scenario_fails_and_names_the_test(tmp_path: Path) -> None:
    tests = '@pytest.mark.scenario("A third one")\ndef test_b(): ...\n'
    done = req_table(tmp_path, DOCUMENT + SCENARIOS, tests)
    assert done.returncode == 1
    assert "tests/test_a.py::test_b (line 1): unknown scenario A third one" in done.stderr
