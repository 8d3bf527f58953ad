"""The course as pages: each chapter run without a GPU, as given and solved, and built by Sphinx into static HTML.

    executing    runs notebooks, and keeps what they gave until something that they depend on changes
    pages        lays out what Sphinx reads: a chapter with each answer folded beneath its exercise, README, docs/
    building     calls Sphinx, and says where the pages lie, how large they are and how long it took
    inspecting   reads the pages that were built: links that lead nowhere, and whatever asks another host

What Sphinx needs is in requirements-site.txt; nothing else of the course imports this.
"""
