"""Pipelines as a picture."""

import re

from holdfast.core.placement import LayerRange
from holdfast.drawing.pipelines import DrawnPipeline, DrawnStage, pipelines_to_svg


def drawn(note):
    stage = DrawnStage(node=0, layers=LayerRange(0, 2), gpus=1, busy=1.0)
    return pipelines_to_svg([DrawnPipeline(name="1 node(s)", note=note, stages=(stage,))], "")


def test_there_is_room_for_what_stands_behind_a_row():
    note = "4307 s; used 45 x 983 mb, 21 x 984 mb"
    told = drawn(note)
    width = int(re.search(r'<svg [^>]*width="(\d+)"', told)[1])
    begins = int(re.search(rf'<text x="(\d+)" [^>]*>{note}<', told)[1])
    assert width - begins >= 7 * len(note)
    assert int(re.search(r'width="(\d+)"', drawn("1 s"))[1]) == 960
