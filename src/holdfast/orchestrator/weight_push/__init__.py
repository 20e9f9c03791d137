"""From weights that the trainer published to weights that the engines serve: the weight push.

A policy version goes three steps. How its bytes travel is the transport's; the rest is the same for every transport.

    publish   the trainer writes a version and makes it visible whole   `trainer.models.weight_publisher`
    stage     an engine reads and checks it, while the old one serves   `inference.weights.transport`
    swap      the engine is paused, and its model takes what is staged  `inference.weights.worker`

The orchestrator is between: it waits until a version is published, has every engine stage and swap it by one
`POST /update_weights`, reads version and digest back, and gives an engine that was lost its weights again (`push`).
Once a run it has them prove that they compute with it (`canary_check`).

`transport` says what a transport is to the orchestrator. There is one, `directory`: safetensors in a directory that
trainer and engines both see. A second one is a file on each side and the line that names it: here beside `directory`
(named in `orchestrator.main`), beside `inference.weights.directory` (named in the worker), and beside the trainer's
publisher. Why the seam lies here: docs/decisions/0020-one-seam-for-weight-transports.md.
"""
