"""The table of docs/develop/testing.md."""

from tests.mutation import report

OTHERS = "\nText below.\n"


def test_a_folder_gets_its_row_and_the_others_keep_theirs(tmp_path, monkeypatch):
    document = tmp_path / "mutation.md"
    document.write_text(f"# Above\n\n{report.HEADER}{OTHERS}", encoding="utf-8")
    monkeypatch.setattr(report, "DOCUMENT", document)
    report.write({"worker": "| `worker` | 1 |"})
    report.write({"storage": "| `storage` | 2 |", "worker": "| `worker` | 3 |"})
    table = "| `storage` | 2 |\n| `worker` | 3 |\n"
    assert document.read_text(encoding="utf-8") == f"# Above\n\n{report.HEADER}{table}{OTHERS}"
