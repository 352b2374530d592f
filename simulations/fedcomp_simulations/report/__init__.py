"""What results say, as one HTML page for whoever did not run the experiment, and its figures as PNGs.

views     the curves behind the page: accuracy over rounds, bytes and link time, mean over seeds
targets   the accuracy to reach, and what it takes
words     the result in plain words
drawing   how figures look; figures: what is in them
tables    the tables
page      the page; markup: its HTML, escaped by construction
write     files in, files out
"""

from fedcomp_simulations.report.write import write_report

__all__ = ["write_report"]
