"""Trains a classifier over a hierarchy of your own, and draws it.

python examples/custom_tree.py --picture tree.png    # some seconds
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

import hstree
from hstree.lm.report import draw_tree

FEATURES, ROWS = 16, 4000
HIERARCHY = {
    "animal": {
        "mammal": ["dog", "cat", "horse", "whale"],
        "bird": ["sparrow", "eagle", "penguin"],
    },
    "plant": {
        "tree": ["oak", "pine", "birch"],
        "flower": ["rose", "tulip"],
    },
}


def nested(node: Any, names: list[str]) -> Any:
    """The hierarchy as nested tuples of class ids, as Tree.from_nested takes it. Appends to `names`
    the name of each class."""
    if isinstance(node, str):
        names.append(node)
        return len(names) - 1
    children = node.values() if isinstance(node, dict) else node
    return tuple(nested(child, names) for child in children)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--picture", metavar="FILE", help="draws the tree to this PNG file")
    parser.add_argument("--steps", type=int, default=500)
    arguments = parser.parse_args()
    torch.manual_seed(0)

    names: list[str] = []
    tree = hstree.trees.Tree.from_nested(nested(HIERARCHY, names))
    print(hstree.trees.describe(tree, words=names))
    if arguments.picture:
        draw_tree(tree, names, arguments.picture)
        print(f"drawn: {arguments.picture}")

    # Features of a row: the prototypes of its class and of the nodes above it, and noise.
    prototype = torch.zeros(len(names), FEATURES)
    vectors: dict[tuple[int, ...], torch.Tensor] = {}
    for c in range(len(names)):
        code = tree.code(c)  # which child to take at each node on the path
        for depth in range(1, len(code) + 1):
            prototype[c] += vectors.setdefault(code[:depth], torch.randn(FEATURES))
    target = torch.randint(len(names), (ROWS,))
    features = prototype[target] + 1.5 * torch.randn(ROWS, FEATURES)
    (features, test), (target, truth) = features.chunk(2), target.chunk(2)

    # The head has two levels: the lowest groups of the hierarchy, and the classes of each.
    groups = tree.collapse(sum(map(len, HIERARCHY.values())))
    head = hstree.TreeEnsemble(FEATURES, len(names), [groups])
    for name, module in (("tree", head), ("softmax", hstree.Softmax(FEATURES, len(names)))):
        optimizer = hstree.optim.AdamW(module.parameters(), lr=0.03)
        for _ in range(arguments.steps):
            rows = torch.randint(len(features), (64,))
            module(features[rows], target[rows]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            right = (module.predict(test) == truth).float().mean()
            print(f"{name:<8} loss {module(test, truth).loss:.3f}, accuracy {right:.3f}")

    # The probability of a branch is the sum over the classes below it.
    below = torch.tensor([tree.code(c)[0] for c in range(len(names))])
    with torch.no_grad():
        animal = head.log_prob(test).exp()[:, below == 0].sum(1)
    for branch, name in enumerate(HIERARCHY):
        print(f"mean P(animal) for each {name}: {animal[below[truth] == branch].mean():.3f}")


if __name__ == "__main__":
    main()
