# Read by llama.cpp's first project() call (CMAKE_PROJECT_llama.cpp_INCLUDE): what halves the time of a build, and no
# option of llama.cpp can set. Only ggml computes; the rest loses nothing by being optimised less.
cmake_language(DEFER DIRECTORY "${CMAKE_SOURCE_DIR}" CALL llama_worker_compile_faster)

function(llama_worker_compile_faster)
    # Most of their compile time goes into the headers that all of their files include.
    set(joined llama-common mtmd server-context llama-server-impl)
    set_property(TARGET ${joined} PROPERTY UNITY_BUILD ON)
    set_property(TARGET ${joined} PROPERTY UNITY_BUILD_BATCH_SIZE 8)
    set_property(
        SOURCE "${CMAKE_SOURCE_DIR}/tools/mtmd/mtmd-helper.cpp" "${CMAKE_SOURCE_DIR}/tools/mtmd/mtmd-helper-gen.cpp"
        TARGET_DIRECTORY mtmd
        PROPERTY SKIP_UNITY_BUILD_INCLUSION ON # each refuses the others' headers
    )
    foreach(target llama ${joined} cpp-httplib)
        target_compile_options(${target} PRIVATE -O1)
    endforeach()
endfunction()
