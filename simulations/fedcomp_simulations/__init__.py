"""The harness: which codec gives which accuracy for how many uploaded bytes, measured with real Flower apps.

Nothing is imported here, so that the command line starts quickly. The pieces:

    experiment   what to run, read from TOML
    datasets     real data from installed packages, and the user's own
    partition    who holds which samples, flwr_partition by the partitioners of flwr-datasets
    network      which network is fitted to what data; models: the networks
    apps         ClientApp and ServerApp, for any Flower engine
    grid         Flower's Grid in one process
    runner       every method with every seed, in this process or in worker processes
    ledger       the bytes of a run
    results      of all runs, as JSON; summary, tables: what they say, in a terminal
    links        how long bytes take
    report       the results as a page with figures
    cli          the command line: commands, display
"""
