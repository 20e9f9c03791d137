"""The orchestrator: turns environments and inference servers into batches of scored rollouts.

    main           the program, from the resolved configuration to the last batch
    batches        which version makes which batch, which groups are in it, and publishing it
    rollouts       the sessions of one problem, what is sampled for them, and the teacher that judges them
    weight_push    from published weights to weights that the engines serve
    engines        the inference servers: asking them, owning them, mending what was lost
    environments   what users write, what is built in, and calling either

Imports `shared` only.
"""
