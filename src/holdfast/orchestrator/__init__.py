"""The orchestrator: turns environments and inference servers into batches of scored rollouts.

    main                                    the program, from the settings to the last batch
    batch_pipeline, batch_maker             one batch after another: its policy version, its tasks, its groups
    episodes, worker, workers               play and score one prompt group, here or in worker processes
    generation_log, state                   what the orchestrator keeps to resume exactly
    weight_sync, teacher, judge_client      weights for the engines; a teacher; judges
    client                                  asks the inference servers, and copes with lost ones
    env                                     what users write, what is built in, and calls of either
    evaluation, check                       the policy on held-out tasks; environments before a start

The orchestrator never imports torch, the trainer or the inference server.
"""
