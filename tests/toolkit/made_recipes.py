"""A short recipe with its lines at known places."""

TEXT = """\
task:
  kind: image_classification
  model:
    name: resnet18
  data:
    source: synthetic
train:
  epochs: 3
  optimizer:
    lr: 1e-1
    momentum: 0.9
prune:
  rules:
    - pattern: 2:4
    - include: [fc]
      pattern: 1:4
"""
