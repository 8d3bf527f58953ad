"""`self_check`: a chapter's last questions are answered out of sight."""

from course_lib import self_check


def test_an_answer_is_folded_under_its_number_and_is_no_markup():
    shown = self_check("132 of 132", "a < b")
    assert repr(shown) == "1. 132 of 132\n2. a < b"
    markup = shown._repr_html_()
    assert markup.count("<details>") == 2 and "open" not in markup
    assert "<summary>Answer 2</summary>a &lt; b</details>" in markup
