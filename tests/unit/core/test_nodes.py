import pytest

from holdfast.core.nodes import NodeId, Process
from holdfast.errors import ConfigError

NODE = NodeId(name="node-a", nonce="0123456789abcdef")


def test_a_process_is_none_of_the_same_number_on_the_same_node():
    one = Process(NODE, 7, "00" * 8)
    assert one == Process(NodeId(name="node-a", nonce="0123456789abcdef"), 7, "00" * 8)
    assert one != Process(NODE, 7, "01" * 8)
    assert one != Process(NodeId(name="node-a", nonce="ff" * 8), 7, "00" * 8), "the node was started anew"


@pytest.mark.parametrize("name", ["", "two words", "a\n", "é", "a" * 256])
def test_a_node_has_a_name_that_a_line_can_hold(name):
    with pytest.raises(ConfigError, match="is no node's name: expected"):
        NodeId(name=name, nonce=NODE.nonce)


@pytest.mark.parametrize("nonce", ["", "0123456789abcde", "0123456789ABCDEF", "0123456789abcdef0"])
def test_a_nonce_is_sixteen_digits(nonce):
    for make in (lambda: NodeId(name="a", nonce=nonce), lambda: Process(NODE, 1, nonce)):
        with pytest.raises(ConfigError, match="is no nonce: expected 16 hexadecimal digits"):
            make()
